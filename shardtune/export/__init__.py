"""What leaves? A trained model as merged weights, an adapter, a GGUF file."""
