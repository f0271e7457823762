"""The only folder that knows Ray: thin actors around pure objects, clients for the protocols, supervision."""
