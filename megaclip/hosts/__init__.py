"""Several hosts.

- `agent`: the rules of `megaclip launch`, on torch's elastic agent.
- `check`: the check of hosts before a run.
"""
