"""`fermata up`: the operator's reconcile core with processes instead of pods."""
