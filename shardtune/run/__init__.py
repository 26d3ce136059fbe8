"""What is a run? Its folder, which one it is, exit codes, failure records, stop requests; beneath launch and train."""
