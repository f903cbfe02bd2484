"""Where workers say that they exist, and where gateways learn of them."""
