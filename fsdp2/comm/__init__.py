"""Communication: streams and events, collectives in the form that suits each backend."""
