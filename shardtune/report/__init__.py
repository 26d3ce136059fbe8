"""What happened? Run folders read back: a self-contained HTML report, comparisons, and a live dashboard."""
