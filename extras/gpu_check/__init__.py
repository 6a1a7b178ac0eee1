"""``make gpu-check``: what only GPUs can show, in 21 checks; a report to send.

Each check runs commands in processes of their own (`runs`), and judges what they found (`check`). A command is a
program of `programs/`, or tests. Every check has a rehearsal: the same program on CPU and gloo, as it is and with a
fault planted (`faults`), or, where a measurement is judged, measurements made up on both sides of the limit. So each
has been seen to fail. `one_gpu` and `several_gpus` list the checks; `machine` says which can run.
"""
