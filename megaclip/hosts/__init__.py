"""Several hosts: the hostfile, restarts after a failure, and the checks before a run."""
