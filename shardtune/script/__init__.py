"""How does any PyTorch script become a run? `shardtune run -- script.py args`."""
