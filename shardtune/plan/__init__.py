"""Will it fit, how long, how much traffic? Arithmetic only: no torch, no GPU."""
