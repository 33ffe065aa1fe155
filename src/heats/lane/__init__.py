"""Lanes: warm worker groups that serve trial after trial."""
