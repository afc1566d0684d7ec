"""Tells others: the metric table, the Prometheus page, the web server, rules and Alertmanager configuration."""
