"""What exactly is trained on? Reading, formatting, tokenising, and the order rows are seen in."""
