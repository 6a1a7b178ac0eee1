"""Tools to look at a model and to plan with: explanations, estimates, timelines, metrics, the command line.

They read the engine, which knows nothing of them. Every part works with torch alone; where another library makes it
nicer (rich, matplotlib, PyYAML), that comes with ``fsdp2[tools]``.
"""
