"""How does the same run start elsewhere? One job description, rendered for Run:ai, Kubeflow, JobSet and Slurm."""
