"""Exporters of run events to TensorBoard, MLflow, W&B and OpenTelemetry (`fedtrain track`)."""
