"""How is it fast? Plain functions, each with an eager twin that defines its meaning."""
