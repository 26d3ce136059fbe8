"""Who holds what? The process group, and FSDP2 over the decoder layers."""
