"""Keras on TensorFlow: tf.distribute and tf.function."""
