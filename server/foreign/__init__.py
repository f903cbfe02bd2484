"""Engines that are not ours, over HTTP: `Engine`s where they speak token ids, a text relay where they do not."""
