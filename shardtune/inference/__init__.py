"""How does a trained model answer? Which one is meant (`source`), in one process (`load`), token by token."""
