"""Programs drawn from a seed, which combine the settings of the engine, and their training beside the plain model.

Where to look: `programs` (what is drawn, and what is legal together), `building` and `model` (what is sharded),
`training`, `events` and `reference` (what is run and expected), `features` and `seeds` (what the short tests cover).
"""
