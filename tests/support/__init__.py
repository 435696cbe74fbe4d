"""What tests share: real servers as child processes, and clients for them."""
