"""The run itself: TRL's trainer with our seams."""
