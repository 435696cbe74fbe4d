"""Room 1: HTTP. Handlers read a request, call the rooms behind them and shape the answer."""
