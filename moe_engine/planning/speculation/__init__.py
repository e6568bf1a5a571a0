"""The drafter: its model, and the depth and tree of drafts."""
