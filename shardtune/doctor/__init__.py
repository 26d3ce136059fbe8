"""Is this machine, and are all nodes together, fit for the run?"""
