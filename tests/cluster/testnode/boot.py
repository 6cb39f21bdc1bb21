"""The inside of the box: starts a whole Kubernetes node, runs the command, and is its process 1.

Etcd to a Ready node, without certificates of its own making or any rights to give: whoever is in the box is admin. A
program of the node that ends is started again, as a machine's own supervisor would.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.testnode import audit, programs, store
from cluster.testnode.box import Plan
from cluster.testnode.errors import Broken

NODE = "node1"
NODE_IP = "172.31.0.1"  # of a veth pair: the kubelet refuses a loopback address, and dummy devices are not everywhere
API = f"https://{NODE_IP}:6443"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
# The second family of a node with both, in the same order; the node's pods have a subnet of each.
NODE_IP6 = "fd00:31::1"
SERVICES6 = "fd00:96::/112"
PODS6 = "fd00:244::/56"
SUBNETS = ("10.244.0.0/24", "fd00:244::/64")
READY_WITHIN_S = 120  # fifteen seconds on two idle cores
POLL_S = 0.1
RESTART_AFTER_S = 5  # long enough that whoever needs the program notices: systemd gives a kubelet 10 s


@dataclass(frozen=True, slots=True)
class _Started:
    """A program of the node that runs."""

    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    """Held, or Python would wait for the process behind our back."""

    @property
    def program(self) -> str:
        return self.words[0]


class Node:
    """The programs of one node, started in their order."""

    def __init__(self, plan: Plan) -> None:
        self.run = plan.run
        self._plan = plan
        self._started: dict[int, _Started] = {}
        self._deadline = time.monotonic() + READY_WITHIN_S
        self._tls = ssl.create_default_context()
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE
        self.environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self.environment |= {
            "PATH": programs.path(list(plan.programs)),
            "KUBECONFIG": str(self.run / "kubeconfig"),
            "CONTAINERD_ADDRESS": str(self.run / "containerd.sock"),
            "CONTAINERD_NAMESPACE": "k8s.io",
            "KUBECACHEDIR": str(self.run / "kubecache"),
            "HELM_CACHE_HOME": str(self.run / "helm"),
            "HELM_CONFIG_HOME": str(self.run / "helm"),
            "HELM_DATA_HOME": str(self.run / "helm"),
            "SLUICE_TEST_NODE": str(self.run),
        }

    def start(self) -> None:
        """Returns when the node is Ready.

        Raises:
            Broken: naming the program that did not come up.
        """
        self._lay_out()
        self._run("openssl", "genrsa", "-out", "sa.key", "2048")
        self._containerd()
        self._control_plane()
        self._kubelet()
        self._wait("kubelet", self._ready)
        self._wait("kube-controller-manager", lambda: self._get("/api/v1/namespaces/default/serviceaccounts/default"))

    def restart(self, process: int, status: int) -> str | None:
        """Start the program of the node that ended so again, in `RESTART_AFTER_S`; its name, if it was one."""
        ended = self._started.pop(process, None)
        if ended is None:
            return None
        ended.process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for: nobody need try again
        self._spawn(*ended.words, after_s=RESTART_AFTER_S)
        return ended.program

    def _lay_out(self) -> None:
        """The network device, and folders that would otherwise be the machine's own."""
        for line in (
            "ip link set lo up",
            "ip link add node0 type veth peer name node0p",
            "ip link set node0p up",
            f"ip addr add {NODE_IP}/24 dev node0",
            "ip link set node0 up",
            "ip route add default dev node0",
            "mount --make-rshared /",
        ):
            self._run(*line.split())
        for folder in ("/run", "/var/lib/cni", "/var/log"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._run("mount", "-t", "tmpfs", "tmpfs", folder)
        Path("/run/lock").mkdir()
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        if self._plan.dual_stack:
            self._run("ip", "addr", "add", f"{NODE_IP6}/64", "dev", "node0", "nodad")
            self._run("ip", "-6", "route", "add", "default", "dev", "node0")
            Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
        (self.run / "cni").mkdir()
        # Nothing answers: a name is refused at once instead of after a time-out.
        (self.run / "resolv.conf").write_text("nameserver 127.0.0.1\noptions attempts:1 timeout:1\n")

    def _containerd(self) -> None:
        store.link(self._plan.store, self.run / "containerd")
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.run / "ipam"),
                "ranges": [[{"subnet": subnet}] for subnet in self._families(*SUBNETS)],
                "routes": [{"dst": everywhere} for everywhere in self._families("0.0.0.0/0", "::/0")],
            },
        }
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
        (self.run / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc could not lower a score and would not start anything.
        (self.run / "containerd.toml").write_text(f"""version = 3
root = "{self.run}/containerd"
state = "{self.run}/containerd-state"
[grpc]
address = "{self.run}/containerd.sock"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "sluice.test/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{self.run}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "{shutil.which("runc", path=self.environment["PATH"])}"
SystemdCgroup = false
""")
        self._spawn("containerd", "-c", f"{self.run}/containerd.toml")

    def _families(self, first: str, second: str) -> list[str]:
        """What there is one of for each family of addresses that the node has."""
        return [first, second] if self._plan.dual_stack else [first]

    def _both(self, first: str, second: str) -> str:
        """The same as an option has it."""
        return ",".join(self._families(first, second))

    def _containerd_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(str(self.run / "containerd.sock"))
        return not subprocess.run(["ctr", "version"], env=self.environment, capture_output=True, check=False).returncode

    def _control_plane(self) -> None:
        run, local = self.run, "http://127.0.0.1:2379"
        (run / "tokens.csv").write_text(f"{self._plan.token},admin,admin,system:masters\n")
        self._spawn(
            "etcd", "--data-dir", f"{run}/etcd", "--listen-client-urls", local, "--advertise-client-urls", local,
            "--listen-peer-urls", "http://127.0.0.1:2380", "--unsafe-no-fsync",
        )  # fmt: skip
        self._spawn(
            "kube-apiserver", "--etcd-servers", local, "--secure-port", "6443", "--bind-address", "0.0.0.0",
            "--advertise-address", NODE_IP, "--cert-dir", f"{run}/certs",
            "--service-cluster-ip-range", self._both(SERVICES, SERVICES6),
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", f"{run}/sa.key",
            "--service-account-signing-key-file", f"{run}/sa.key", "--token-auth-file", f"{run}/tokens.csv",
            "--authorization-mode", "Node,RBAC", "--allow-privileged",
            "--kubelet-preferred-address-types", "InternalIP", *audit.flags(run), *self._aggregation(),
        )  # fmt: skip
        self._wait("kube-apiserver", lambda: self._get("/readyz"))
        cluster = {"server": API, "certificate-authority": f"{run}/certs/apiserver.crt"}
        (run / "kubeconfig").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "node",
            "clusters": [{"name": "node", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self._plan.token}}],
            "contexts": [{"name": "node", "context": {"cluster": "node", "user": "admin"}}],
        }))  # fmt: skip
        self._spawn(
            "kube-controller-manager", "--kubeconfig", f"{run}/kubeconfig", "--leader-elect=false",
            "--service-account-private-key-file", f"{run}/sa.key", "--root-ca-file", f"{run}/certs/apiserver.crt",
            "--use-service-account-credentials", "--allocate-node-cidrs", "--cluster-cidr", self._both(PODS, PODS6),
            "--flex-volume-plugin-dir", f"{run}/volumeplugins",
        )  # fmt: skip
        self._spawn("kube-scheduler", "--kubeconfig", f"{run}/kubeconfig", "--leader-elect=false")

    def _aggregation(self) -> Sequence[str]:
        """What the API server needs to pass requests on to others, such as a server of metrics: who it is to them."""
        key, certificate = f"{self.run}/front-proxy.key", f"{self.run}/front-proxy.crt"
        words = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=front-proxy"
        self._run("openssl", "req", "-x509", *words.split(), "-keyout", key, "-out", certificate)
        return (
            "--proxy-client-cert-file", certificate, "--proxy-client-key-file", key,
            "--requestheader-client-ca-file", certificate, "--requestheader-allowed-names", "front-proxy",
            "--requestheader-username-headers", "X-Remote-User", "--requestheader-group-headers", "X-Remote-Group",
            "--requestheader-extra-headers-prefix", "X-Remote-Extra-",
        )  # fmt: skip

    def _kubelet(self) -> None:
        self._wait("containerd", self._containerd_answers)
        (self.run / "kubelet.yaml").write_text(json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "failCgroupV1": False, "failSwapOn": False, "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.run.name}",
            "containerRuntimeEndpoint": f"unix://{self.run}/containerd.sock",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "localStorageCapacityIsolation": False,
            # A full disk of the machine is not the node's business: no eviction and no image cleaning for it.
            "evictionHard": {"memory.available": "100Mi"}, "imageGCHighThresholdPercent": 100,
            "podLogsDir": f"{self.run}/podlogs", "volumePluginDir": f"{self.run}/volumeplugins",
            "resolvConf": f"{self.run}/resolv.conf",
        }))  # fmt: skip
        self._spawn(
            "kubelet", "--config", f"{self.run}/kubelet.yaml", "--kubeconfig", f"{self.run}/kubeconfig",
            "--root-dir", f"{self.run}/kubelet", "--cert-dir", f"{self.run}/pki",
            "--hostname-override", NODE, "--node-ip", self._both(NODE_IP, NODE_IP6),
        )  # fmt: skip
        self._spawn(
            "kube-proxy", "--kubeconfig", f"{self.run}/kubeconfig", "--proxy-mode", "iptables",
            "--cluster-cidr", self._both(PODS, PODS6), "--hostname-override", NODE, "--conntrack-max-per-core", "0",
            "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0",
        )  # fmt: skip

    def _ready(self) -> bool:
        node = self._get(f"/api/v1/nodes/{NODE}")
        conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and not node["spec"].get("taints")

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{API}{path}", headers={"Authorization": f"Bearer {self._plan.token}"})
        with urllib.request.urlopen(request, timeout=5, context=self._tls) as answer:
            body = answer.read()
        return json.loads(body) if body[:1] == b"{" else body

    def _wait(self, program: str, done: Callable[[], object]) -> None:
        while True:
            with contextlib.suppress(OSError, KeyError):
                if done():
                    return
            for process, started in self._started.items():
                if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    raise Broken(f"{started.program} ended: {_last_line(self.run / f'{started.program}.log')}")
            if time.monotonic() > self._deadline:
                raise Broken(
                    f"{program} is not ready after {READY_WITHIN_S} s: {_last_line(self.run / f'{program}.log')}"
                )
            time.sleep(POLL_S)

    def _spawn(self, *words: str, after_s: int = 0) -> None:
        pause = ("sh", "-c", 'sleep "$0" && exec "$@"', str(after_s)) if after_s else ()
        with (self.run / f"{words[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [*pause, *words],
                cwd=self.run,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # an interrupt from the terminal is for the command alone
            )
        self._started[process.pid] = _Started(words, process)

    def _run(self, *words: str) -> None:
        done = subprocess.run(words, cwd=self.run, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Broken(f"{' '.join(words)}: {done.stderr.strip()}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f"{lines[-1] if lines else 'it said nothing'} (all of it: {log.name})"


def main(run: Path, command: Sequence[str]) -> int:
    """Starts the node, then the command, and stays process 1 until the command ends: its exit code."""
    begun = time.monotonic()
    node = Node(Plan.read(run))
    try:
        node.start()
    except Broken as error:
        print(f"node: {error}", file=sys.stderr)
        return 1
    print(f"node: Ready after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    try:
        child = subprocess.Popen(command, env=node.environment)
    except OSError as error:
        print(f"node: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command as well, which decides
    while True:  # process 1 inherits every orphan, such as containerd's shims
        process, status = os.waitpid(-1, 0)
        if process == child.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if name := node.restart(process, status):
            print(f"node: {name} ended: {_last_line(run / f'{name}.log')}", file=sys.stderr, flush=True)
