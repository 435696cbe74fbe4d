"""Child processes that compile clients' grammars and render their templates."""
