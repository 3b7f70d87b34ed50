"""Reward models: what a text is worth, finished or not.

`rewards.base` has the interface, `rewards.loading` builds a reward from its source.
"""
