"""Files: uploads of customers and results of batches, in an object store."""
