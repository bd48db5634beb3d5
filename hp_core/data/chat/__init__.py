"""Conversations: from rows of any format to tokens, of which exactly the answers are trained."""
