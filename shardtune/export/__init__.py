"""What leaves? A trained model in the form its next user needs: merged weights, an adapter, a GGUF file."""
