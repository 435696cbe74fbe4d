"""Room 4: prompts become token ids, and are fitted into the context window."""
