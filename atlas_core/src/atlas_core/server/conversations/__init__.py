"""Conversations: lists of items that responses go on with."""
