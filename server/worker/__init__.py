"""`headrace worker`: the engine cores of one machine, for gateways elsewhere."""
