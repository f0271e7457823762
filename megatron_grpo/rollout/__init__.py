"""One prompt becomes one scored trajectory group. Knows neither Ray nor an engine: both come as protocols."""
