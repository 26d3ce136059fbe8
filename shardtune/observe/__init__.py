"""What is happening? Events on disk for machines, lines and bars on the terminal for people."""
