"""Brings what runs to what the two manifests say: processes on one machine (`local`), pods in a cluster.

`plan` and `reconcile` are pure and shared by both; `link` speaks to routers and workers.
"""
