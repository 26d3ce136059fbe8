"""Start processes here: who am I, the run's folder, torch's elastic launcher, and what a worker says when it fails."""
