"""Small programs in which what surrounds training meets: hooks, surgery, containers, threads; run sharded and plain.

Where to look: `programs` (the options and what cannot be together), `model`, `actions`, `training`.
"""
