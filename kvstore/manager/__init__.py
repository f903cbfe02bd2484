"""Tiers behind one client for each engine: what is looked up, loaded, saved, kept and dropped, and when."""
