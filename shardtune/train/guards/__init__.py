"""Is something going wrong? Guards look at every step and say so, leave it out, go back, or stop (docs/guards.md)."""
