"""The engines behind one HTTP layer: who they are, how they are reached, and what is routed to them."""
