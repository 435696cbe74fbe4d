"""Response streaming: render replies as server-sent events or as one JSON body."""
