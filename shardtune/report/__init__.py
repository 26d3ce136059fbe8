"""What happened? Run folders read back: one HTML file that needs nothing else, comparisons, and a live dashboard."""
