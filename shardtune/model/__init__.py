"""How do the weights get here? Finding a model folder, loading it whole, its tokenizer."""
