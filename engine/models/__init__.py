"""Model architectures as plain torch modules."""
