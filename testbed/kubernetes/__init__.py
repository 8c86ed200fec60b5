"""A real Kubernetes cluster of one node for tests, in separate namespaces. Root only.

    with kubernetes_cluster(folder) as found:        # or the reason why there is none
        found.add_image("local/shell:1", root)
        found.restart("kubelet")

The control plane and the kubelet come from `$KUBEBUILDER_ASSETS`; containerd, runc and the network plugins from Debian
packages. Any version of Kubernetes will do; 1.20 on cgroup v1 is tested. All processes are in one PID namespace that
ends with the caller. The folder keeps the logs.
"""
