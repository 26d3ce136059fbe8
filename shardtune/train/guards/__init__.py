"""Is something going wrong? Guards check every step and warn, skip it, roll back, or stop the run (docs/guards.md)."""
