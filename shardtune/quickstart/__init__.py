"""Does it work on this machine? A real model learns sentence → JSON in minutes, and shows what it learned.

`phrasings` (what people say) → `sentences` (the seeded set) → `weights` (the model) → `recipe` (the config that trains
it) → `score` (before and after). Nothing here imports torch before it is asked to.
"""
