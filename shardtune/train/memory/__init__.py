"""What held the memory when it ran out, and what would free enough? (docs/out-of-memory.md)"""
