"""Float formats, error budgets, the inputs that break low-precision attention, and how their harm is measured."""
