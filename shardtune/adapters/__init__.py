"""What trains? Target resolution, PEFT LoRA, and the table that shows it."""
