"""Several hosts: the agent of `megaclip launch`, and the check of hosts before a run.

- `agent` adds rules to torch's elastic agent, and watches the heartbeats of the hosts.
- `facts` collects what a rank reports, `network` measures its connections, and `compare` finds problems in the reports.
"""
